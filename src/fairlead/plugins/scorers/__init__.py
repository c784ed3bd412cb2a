"""plugins/scorers"""
