//! Write-behind (the mvcc helper's).
