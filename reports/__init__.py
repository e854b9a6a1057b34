"""What we say: records in; terminal table, Markdown, JUnit and HTML out. Never imports torch."""
