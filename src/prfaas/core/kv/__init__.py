"""Models of a request's KVCache, and how many bytes of it must move."""
