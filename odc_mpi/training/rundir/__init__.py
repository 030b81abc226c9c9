"""What a run leaves in its directory, who may write there, and how a later run goes on from it."""
