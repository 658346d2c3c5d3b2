"""What tests and checks share: small models, packs, parameters of requests, faults.

Contract: it imports the product and no test. Tests do not import checks, nor checks tests.
"""
