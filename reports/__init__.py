"""Reports of runs: records in; terminal table, Markdown, JUnit and HTML out. Never imports torch."""
