/* Counts the live bytes of a process that were allocated with an alignment.

   TensorFlow's CPU tensors and oneDNN's buffers are; Python's and NumPy's memory is not. Blocks
   of less than 16 KiB are left out: nearly all are TensorFlow's graphs and queues. To be preloaded
   (LD_PRELOAD), with TF_ONEDNN_USE_SYSTEM_ALLOCATOR=1, without which TensorFlow takes large regions
   from the system and divides them itself. */
#include <errno.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

extern void __libc_free(void *);
extern void *__libc_memalign(size_t, size_t);

#define SLOTS (1u << 20) /* of the table of blocks; open addressing */
#define SMALLEST 16384
#define LINE 63 /* blocks begin at a multiple of 64, a cache line */
#define GONE ((void *)1)

static void *blocks[SLOTS];
static size_t sizes[SLOTS];
static long live, peak;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static unsigned first_slot(void *block) {
  return (unsigned)((uintptr_t)block >> 6) * 2654435761u & (SLOTS - 1);
}

static void add(void *block, size_t size) {
  pthread_mutex_lock(&lock);
  unsigned slot = first_slot(block);
  while (blocks[slot] && blocks[slot] != GONE) slot = (slot + 1) & (SLOTS - 1);
  blocks[slot] = block;
  sizes[slot] = size;
  live += (long)size;
  if (live > peak) peak = live;
  pthread_mutex_unlock(&lock);
}

static void take_away(void *block) {
  pthread_mutex_lock(&lock);
  unsigned slot = first_slot(block);
  while (blocks[slot] && blocks[slot] != block) slot = (slot + 1) & (SLOTS - 1);
  if (blocks[slot]) {
    blocks[slot] = GONE;
    live -= (long)sizes[slot];
  }
  pthread_mutex_unlock(&lock);
}

void free(void *block) {
  if (block && !((uintptr_t)block & LINE)) take_away(block);
  __libc_free(block);
}

void *memalign(size_t alignment, size_t size) {
  void *block = __libc_memalign(alignment, size);
  if (block && size >= SMALLEST && !((uintptr_t)block & LINE)) add(block, size);
  return block;
}

void *aligned_alloc(size_t alignment, size_t size) { return memalign(alignment, size); }

int posix_memalign(void **out, size_t alignment, size_t size) {
  void *block = memalign(alignment, size);
  if (!block) return ENOMEM;
  *out = block;
  return 0;
}

long allocations_live(void) { return live; }
long allocations_peak(void) { return peak; }
