"""Flatbed behind other libraries' own interfaces."""
