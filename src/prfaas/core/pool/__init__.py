"""The rules of the prefix-cache pool: keys of prefixes, sizes of pages, what is usable, worth loading and kept."""
