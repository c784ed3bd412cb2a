#!/bin/sh
# Of the image. Flags alone are the reference picker's command line: its chart gives nothing else.
case "$1" in
    --help | --version) exec fairlead "$@" ;;
    -*) exec fairlead epp "$@" ;;
    *) exec fairlead "$@" ;;
esac
