"""EXP-002: what does it cost to give blocks to an agent and to take them back?"""
