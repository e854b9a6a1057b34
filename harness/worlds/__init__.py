"""N ranks and how they live: threads of one process, or processes of their own, behind one function."""
