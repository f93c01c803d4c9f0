//! Object stores for Hocket: parallel ranged reads, multipart and conditional writes, retries, byte budgets.
