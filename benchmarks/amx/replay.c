/* Calls the kernels as record.py wrote it, without an operating system, and compares all that they leave; any NaN equals any. Writes to the
   first serial port. */
#include <stddef.h>
#include <stdint.h>

enum { VALUE, READ, WRITTEN };
typedef int64_t I;
typedef int (*Function)(I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I);

int nm_block_bf16(), nm_block_bf16_turned(), nm_block_bf16_sampled(), nm_block_int8(), nm_bitmap_bf16();
static struct {
  const char *name;
  Function function;
  int bytes; /* of a number of the result */
  I calls, wrong;
} known[] = {
  {"nm_block_bf16", (Function)nm_block_bf16, 2},
  {"nm_block_bf16_turned", (Function)nm_block_bf16_turned, 2},
  {"nm_block_bf16_sampled", (Function)nm_block_bf16_sampled, 4},
  {"nm_block_int8", (Function)nm_block_int8, 4},
  {"nm_bitmap_bf16", (Function)nm_bitmap_bf16, 2},
};

static void out(int port, int byte) { __asm__ volatile("outb %b0, %w1" ::"a"(byte), "Nd"(port)); }

static void letter(int c) {
  uint8_t ready;
  do __asm__ volatile("inb %w1, %b0" : "=a"(ready) : "Nd"(0x3fd));
  while (!(ready & 0x20));
  out(0x3f8, c);
}

static void say(const char *text) {
  while (*text) letter(*text++);
}

static void say_number(I v) {
  if (v >= 10) say_number(v / 10);
  letter('0' + v % 10);
}

/* What the kernels take of a C library. */
void *memcpy(void *to, const void *from, size_t count) {
  void *start = to;
  __asm__ volatile("rep movsb" : "+D"(to), "+S"(from), "+c"(count)::"memory");
  return start;
}

void *memset(void *to, int value, size_t count) {
  void *start = to;
  __asm__ volatile("rep stosb" : "+D"(to), "+c"(count) : "a"(value) : "memory");
  return start;
}

void *aligned_alloc(size_t alignment, size_t count) {
  static char *next = (char *)0x60000000;
  char *here = next;
  next += (count + alignment) / alignment * alignment;
  return here;
}

void free(void *memory) { (void)memory; }

int pthread_once(int *once, void (*function)(void)) {
  if (!*once) function();
  *once = 1;
  return 0;
}

int pthread_key_create(void *key, void *function) { return (void)key, (void)function, 1; }
int pthread_setspecific(unsigned key, const void *value) { return (void)key, (void)value, 0; }
long syscall(long number, ...) { return (void)number, 0; }

static int same(const char *a, const char *b) {
  while (*a && *a == *b) a++, b++;
  return *a == *b;
}

static int is_nan(uint32_t number, int bytes) { return bytes == 2 ? (number & 0x7fff) > 0x7f80 : (number & 0x7fffffff) > 0x7f800000; }

static int differ(const char *a, const char *b, int bytes) {
  uint32_t x = 0, y = 0;
  memcpy(&x, a, bytes), memcpy(&y, b, bytes);
  return x != y && !(is_nan(x, bytes) && is_nan(y, bytes));
}

static const char *replay(const char *at) {
  const int count = sizeof known / sizeof *known;
  int k = 0, wrong;
  while (k < count && !same(known[k].name, at)) k++;
  if (k == count) {
    say("FAIL: an unknown function\n");
    return NULL;
  }
  I head[2], operand[16] = {0}, size[16];
  const char *expected[16] = {0};
  char *memory = (char *)0x40000000;
  memcpy(head, at + 32, sizeof head);
  at += 48;
  for (I j = 0; j < head[0]; j++) {
    I two[2];
    memcpy(two, at, sizeof two);
    at += sizeof two;
    if (two[0] == VALUE) {
      operand[j] = two[1];
      continue;
    }
    operand[j] = (I)memory, size[j] = two[1];
    memcpy(memory, at, two[1]);
    at += two[1];
    memory += (two[1] + 127) / 64 * 64;
    if (two[0] == WRITTEN) expected[j] = at, at += two[1];
  }
  const I *o = operand;
  wrong = known[k].function(o[0], o[1], o[2], o[3], o[4], o[5], o[6], o[7], o[8], o[9], o[10], o[11], o[12], o[13], o[14], o[15]) != head[1];
  for (I j = 0; j < head[0]; j++)
    for (I e = 0; expected[j] && e < size[j]; e += known[k].bytes) wrong |= differ((char *)o[j] + e, expected[j] + e, known[k].bytes);
  known[k].calls++, known[k].wrong += wrong;
  return at;
}

void start(const uint32_t *found) { /* what multiboot has: how many files, and where they are listed */
  out(0x3fb, 3); /* letters have 8 bits */
  const uint32_t *files = (const uint32_t *)(uintptr_t)found[6];
  for (uint32_t i = 0; i < found[5]; i++) {
    const char *at = (const char *)(uintptr_t)files[4 * i], *end = (const char *)(uintptr_t)files[4 * i + 1];
    while (at && at < end) at = replay(at);
  }
  for (unsigned k = 0; k < sizeof known / sizeof *known; k++) {
    say(known[k].calls && !known[k].wrong ? "PASS " : "FAIL "), say(known[k].name), say(": ");
    say_number(known[k].calls), say(" calls, "), say_number(known[k].wrong), say(" differ\n");
  }
  say("DONE\n");
}
