"""The reasons with which a contract's test may be skipped."""

# The start of the reason where the feature does not exist on the release.
ABSENT = "absent:"
# After the first failure, where that was to end the contract.
NOT_RUN = "not run after the first failure"
