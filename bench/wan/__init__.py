"""A laboratory for wide-area links: network namespaces joined by an emulated network."""
