"""The processes behind the server: templates, worlds forked from them, and the jobs executor."""
