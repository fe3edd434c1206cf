"""Which instance holds which prefix: block hashes of token ids, and the index that the engines' events feed."""
