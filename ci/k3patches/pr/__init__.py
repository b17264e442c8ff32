"""One pull request: a patch as a branch on upstream's tree with its description, and a branch as a patch again.

The patches' texts are merged by the rebase engine's functions; here is what stands around them.
"""
