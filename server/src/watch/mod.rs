//! From committed events to clients (the watch helper's: hub, watcher_set, catch_up).
