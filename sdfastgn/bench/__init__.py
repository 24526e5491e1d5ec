"""The benchmark harness behind the command line and the scripts."""
