"""Engines that prfaas drives."""
