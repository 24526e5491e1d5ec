"""Records what one call of a model computes, as an fx graph of PyTorch's ops without in-place writes."""
