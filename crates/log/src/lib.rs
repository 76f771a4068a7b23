//! teeline-log
