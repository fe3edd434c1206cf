"""The protocol as state machines: frames and the time in, frames and facts out. It has no thread, socket or clock."""
