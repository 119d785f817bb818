"""The controller: topics, resizes in resumable steps, and the reaper (ordering.md, section 4)."""
