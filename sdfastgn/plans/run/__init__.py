"""What plans run: the steps, and the straight code that calls them."""
