#!/bin/sh
# The kernels for AMX in the emulator Bochs: check.sh SOURCES, the folder of Bochs' sources that has `configure`.
set -eu
sources=$(realpath "$1")
here=$(dirname "$(realpath "$0")")
export RECORD="${RECORD:-$(mktemp -d)}"
python="${PYTHON:-python}"

if [ ! -x "$sources/bochs" ]; then
  # two mistakes of Bochs as of August 2026: the bytes of a weight have no sign, and a mask of 32 bits expands nothing
  sed -i -E '/^BX_CPP_INLINE Bit32u DPBDSU/,/^}/ s/Bit32s\(xbyte\[(.)\]\) \* Bit32u/Bit32s((Bit8s)xbyte[\1]) * Bit32s/' "$sources/cpu/avx/amx.cc"
  sed -i 's/= (1 << popcntd(opmask)) - 1;/= Bit32u((BX_CONST64(1) << popcntd(opmask)) - 1);/' "$sources/cpu/avx/avx512.cc"
  (cd "$sources" && ./configure --enable-x86-64 --enable-cpu-level=6 --enable-avx --enable-evex --enable-amx --enable-handlers-chaining \
    --enable-repeat-speedups --enable-fast-function-calls --disable-gdb-stub --disable-plugins --disable-docbook --with-nogui &&
    make bochs) > "$RECORD/bochs.build" 2>&1
fi

cd "$here/../.."
PYTHONPATH="$here" "$python" -m pytest -p record -p no:cacheprovider -n0 -k tiles tests/fast/cpu/test_block_products.py

cd "$RECORD"
gcc -O1 -ffreestanding -fno-pic -fno-stack-protector -fno-tree-loop-distribute-patterns -fcf-protection=none -w -c "$here/replay.c"
gcc -c "$here/start.S"
ld -n -static -Ttext=0x200000 --section-start=.multiboot=0x1ff000 -z noexecstack --no-warn-rwx-segments -o replay64 start.o replay.o bf16.o int8.o
mkdir -p disk/isolinux
objcopy -I elf64-x86-64 -O elf32-i386 replay64 disk/replay
mv calls disk/
cp /usr/lib/ISOLINUX/isolinux.bin disk/isolinux/
for part in ldlinux mboot libcom32; do cp "/usr/lib/syslinux/modules/bios/$part.c32" disk/isolinux/; done
printf 'DEFAULT l\nPROMPT 0\nLABEL l\n  KERNEL mboot.c32\n  APPEND /replay --- /calls\n' > disk/isolinux/isolinux.cfg
xorriso -as mkisofs -quiet -o disk.iso -b isolinux/isolinux.bin -c isolinux/boot.cat -no-emul-boot -boot-load-size 4 -boot-info-table disk
cat > settings <<END
cpu: model=sapphire_rapids, count=1, ips=100000000
megs: 2560
romimage: file=$sources/bios/BIOS-bochs-latest
vgaromimage: file=$sources/bios/VGABIOS-lgpl/VGABIOS-lgpl-latest.bin
display_library: nogui
com1: enabled=1, mode=file, dev=said
ata0-master: type=cdrom, path=disk.iso, status=inserted
boot: cdrom
clock: sync=none
log: log
info: action=ignore
panic: action=fatal
END
: > said
"$sources/bochs" -q -f settings > screen 2>&1 &
while kill -0 $! 2> /dev/null && ! grep -q -a DONE said; do sleep 1; done
kill $! 2> /dev/null || true
grep -a -E '^(PASS|FAIL|DONE)' said
grep -q -a DONE said && ! grep -q -a FAIL said
