"""Configuration files of other makers' agents: what they hold for a server of ours, and how a
file that belongs to a user is changed. Knows no engine; asks a server only for its models."""
