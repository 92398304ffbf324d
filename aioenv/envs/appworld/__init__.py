"""AppWorld: the env (env.py), setting it up (install.py), what agents read (prompt.py) and demo data (demo)."""
