//! teeline-ring
