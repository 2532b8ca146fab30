"""Relays with which `benchmarks.proxy_overhead` compares the proxy."""
