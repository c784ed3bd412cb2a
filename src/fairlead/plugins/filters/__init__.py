"""plugins/filters"""
