"""The commands, a file each: its arguments, and what it does. A new file is a new command."""
