"""plugins/policies"""
