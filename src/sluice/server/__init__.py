"""Serves an open engine to many requests at once; knows no command line. Its extra: pip install 'sluice[serve]'."""
