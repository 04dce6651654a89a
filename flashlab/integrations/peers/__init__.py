"""Others' libraries that ours is compared with, a file per library. One is imported only when it is asked for."""
