#include "open.c"
