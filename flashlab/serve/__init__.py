"""Serving: who owns which page of K and V, what a server does with them, and what that costs."""
