/* From a multiboot loader to start() in 64-bit mode, with memory as it is and AVX-512 and tiles switched on. */
.code32
.section .multiboot, "a"
.align 4
.long 0x1BADB002, 1, -(0x1BADB002 + 1)
.text
.global _start
_start:
  cli
  mov $stack_end, %esp
  mov %ebx, found
  movl $tables + 0x1003, tables /* 4 GB in pages of 2 MB */
  mov $tables + 0x1000, %edi
  mov $tables + 0x2003, %eax
  mov $4, %ecx
1: mov %eax, (%edi)
  add $8, %edi
  add $0x1000, %eax
  loop 1b
  mov $tables + 0x2000, %edi
  mov $0x83, %eax
  mov $2048, %ecx
1: mov %eax, (%edi)
  add $8, %edi
  add $0x200000, %eax
  loop 1b
  mov $tables, %eax
  mov %eax, %cr3
  mov %cr4, %eax
  or $0x40620, %eax /* PAE, OSFXSR, OSXMMEXCPT, OSXSAVE */
  mov %eax, %cr4
  mov $0xC0000080, %ecx
  rdmsr
  or $0x100, %eax /* long mode */
  wrmsr
  mov %cr0, %eax
  and $~4, %eax
  or $0x80000002, %eax
  mov %eax, %cr0
  lgdt segments_at
  ljmp $8, $2f
.code64
2:
  mov $16, %eax
  mov %eax, %ds
  mov %eax, %es
  mov %eax, %ss
  xor %ecx, %ecx
  xor %edx, %edx
  mov $0x600e7, %eax /* x87, SSE, AVX, AVX-512, tiles */
  xsetbv
  mov $stack_end, %rsp
  mov found, %edi
  call start
3: hlt
  jmp 3b
.data
.align 16
segments: .quad 0, 0x00209A0000000000, 0x0000920000000000
segments_at: .word 23
  .long segments
found: .long 0
.bss
.align 4096
tables: .skip 0x6000
.skip 1 << 22
stack_end:
