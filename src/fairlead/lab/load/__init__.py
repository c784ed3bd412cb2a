"""Open-loop load generator and side-by-side reports against a live gateway. Linux only (epoll, timerfd)."""
