"""The rules of the prefix-cache pool: its pages and their sizes, their keys, and which of them a request can use."""
