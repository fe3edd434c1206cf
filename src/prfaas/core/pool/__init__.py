"""The prefix-cache pool's rules, without any memory, file or socket."""
