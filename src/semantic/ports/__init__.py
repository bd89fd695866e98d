"""What the application offers (inbound) and what it needs (outbound), as protocols."""
