/* A libnvidia-ml.so.1 without a GPU: what it answers stands in a text file, read anew at each call.

   FAKE_NVML names the file. A line of "key=value" is of the library, one of "N key=value" of GPU N:

     gpus=4                  how many there are
     init=18                 what nvmlInit returns; 18 is a driver of another version
     0 utilization=93        per cent
     0 memory_utilization=40
     0 memory_used=123 / memory_total=456    bytes
     0 memory_reserved=7     bytes of the driver's own; the first version of the call counts them as used
     0 power=250500          milliwatts
     0 temperature=61        degrees
     0 sm_clock=1410         MHz
     0 pcie_sent=2000 / pcie_received=3000   KB/s
     0 links=4               active NVLinks; 0: it has none that is active; left out: none at all
     0 nvlink_sent=5000 / nvlink_received=6000   KiB/s, since nvmlInit
     0 mig=1                 it is cut up: no utilization; its part has a UUID and memory of its own
     0 part_memory_used=7 / part_memory_total=8
     0 lost_after=3          the GPU vanishes after so many reads of its power

   What stands nowhere is not supported. With -DOLD_DRIVER there is no nvmlDeviceGetTemperatureV,
   and no nvmlDeviceGetMemoryInfo_v2.
   A call of PCIe's throughput takes 20 ms, as on real drivers. */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { OK = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, GPU_IS_LOST = 15 };
enum { MOST = 16, LINK_SPEED_SENT = 138, LINK_SPEED_RECEIVED = 139, ALL_LINKS = 0xFFFFFFFF };

struct gpu {
  int index, is_part, reads;
};
static struct gpu gpus[MOST], parts[MOST];
static double began;

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + t.tv_nsec * 1e-9;
}

/* The value of a key of the library (index -1) or of a GPU; 0 if it stands nowhere. */
static int script(int index, const char *key, double *value) {
  const char *name = getenv("FAKE_NVML");
  FILE *file = name ? fopen(name, "r") : NULL;
  char line[256], wanted[128];
  int found = 0;
  if (!file) return 0;
  if (index < 0)
    snprintf(wanted, sizeof wanted, "%s=", key);
  else
    snprintf(wanted, sizeof wanted, "%d %s=", index, key);
  while (fgets(line, sizeof line, file))
    if (!strncmp(line, wanted, strlen(wanted))) {
      *value = atof(line + strlen(wanted));
      found = 1;
    }
  fclose(file);
  return found;
}

static int lost(struct gpu *g) {
  double after;
  return script(g->index, "lost_after", &after) && gpus[g->index].reads >= after;
}

static int number(struct gpu *g, const char *key, unsigned *answer) {
  double value;
  if (lost(g)) return GPU_IS_LOST;
  if (!script(g->index, key, &value)) return NOT_SUPPORTED;
  *answer = (unsigned)value;
  return OK;
}

static int is_cut_up(struct gpu *g) {
  double value;
  return script(g->index, "mig", &value) && value;
}

int nvmlInitWithFlags(unsigned flags) {
  double code = OK;
  (void)flags;
  for (int i = 0; i < MOST; i++) {
    gpus[i] = (struct gpu){i, 0, gpus[i].reads};
    parts[i] = (struct gpu){i, 1, 0};
  }
  if (!began) began = now();
  script(-1, "init", &code);
  return (int)code;
}
int nvmlShutdown(void) { return OK; }
const char *nvmlErrorString(int code) { return code ? "an error of the fake" : "none"; }

int nvmlDeviceGetCount_v2(unsigned *count) {
  double value = 0;
  script(-1, "gpus", &value);
  *count = (unsigned)value;
  return OK;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, struct gpu **g) {
  unsigned count;
  nvmlDeviceGetCount_v2(&count);
  if (index >= count) return INVALID_ARGUMENT;
  *g = &gpus[index];
  return lost(*g) ? GPU_IS_LOST : OK;
}

int nvmlDeviceGetIndex(struct gpu *g, unsigned *index) {
  *index = g->index;
  return OK;
}

int nvmlDeviceGetName(struct gpu *g, char *name, unsigned size) {
  snprintf(name, size, g->is_part ? "Fake GPU MIG 1g.5gb" : "Fake GPU");
  return lost(g) ? GPU_IS_LOST : OK;
}

int nvmlDeviceGetUUID(struct gpu *g, char *uuid, unsigned size) {
  snprintf(uuid, size, "%s-%d0000000-fake", g->is_part ? "MIG" : "GPU", g->index);
  return lost(g) ? GPU_IS_LOST : OK;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, struct gpu **g) {
  char own[96];
  for (int i = 0; i < MOST; i++) {
    nvmlDeviceGetUUID(&parts[i], own, sizeof own);
    if (!strcmp(uuid, own) && is_cut_up(&parts[i])) {
      *g = &parts[i];
      return OK;
    }
  }
  return NOT_FOUND;
}

int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(struct gpu *part, struct gpu **whole) {
  *whole = &gpus[part->index];
  return OK;
}

int nvmlDeviceGetUtilizationRates(struct gpu *g, unsigned rates[2]) {
  int code = number(g, "utilization", &rates[0]);
  if (is_cut_up(g)) return NOT_SUPPORTED;
  rates[1] = 0;
  number(g, "memory_utilization", &rates[1]);
  return code;
}

static int memory(struct gpu *g, double *total, double *used, double *reserved) {
  if (!script(g->index, g->is_part ? "part_memory_used" : "memory_used", used) ||
      !script(g->index, g->is_part ? "part_memory_total" : "memory_total", total))
    return NOT_SUPPORTED;
  if (!script(g->index, "memory_reserved", reserved)) *reserved = 0;
  return OK;
}

int nvmlDeviceGetMemoryInfo(struct gpu *g, unsigned long long answer[3]) {
  double total, used, reserved;
  if (lost(g)) return GPU_IS_LOST;
  if (memory(g, &total, &used, &reserved) != OK) return NOT_SUPPORTED;
  answer[0] = (unsigned long long)total;
  answer[1] = (unsigned long long)(total - used - reserved);
  answer[2] = (unsigned long long)(used + reserved);
  return OK;
}

#ifndef OLD_DRIVER
/* A version, then total, reserved, free, and used. */
int nvmlDeviceGetMemoryInfo_v2(struct gpu *g, unsigned long long answer[5]) {
  double total, used, reserved;
  if (lost(g)) return GPU_IS_LOST;
  if (memory(g, &total, &used, &reserved) != OK) return NOT_SUPPORTED;
  answer[1] = (unsigned long long)total;
  answer[2] = (unsigned long long)reserved;
  answer[3] = (unsigned long long)(total - used - reserved);
  answer[4] = (unsigned long long)used;
  return OK;
}
#endif

int nvmlDeviceGetPowerUsage(struct gpu *g, unsigned *milliwatts) {
  int code = number(g, "power", milliwatts);
  gpus[g->index].reads++;
  return code;
}

int nvmlDeviceGetTemperature(struct gpu *g, int sensor, unsigned *degrees) {
  return sensor ? NOT_SUPPORTED : number(g, "temperature", degrees);
}

#ifndef OLD_DRIVER
int nvmlDeviceGetTemperatureV(struct gpu *g, unsigned temperature[3]) {
  return nvmlDeviceGetTemperature(g, (int)temperature[1], &temperature[2]);
}
#endif

int nvmlDeviceGetClockInfo(struct gpu *g, int clock, unsigned *megahertz) {
  return clock == 1 ? number(g, "sm_clock", megahertz) : NOT_SUPPORTED;
}

int nvmlDeviceGetPcieThroughput(struct gpu *g, int counter, unsigned *kilobytes) {
  int code = number(g, counter ? "pcie_received" : "pcie_sent", kilobytes);
  if (code == OK) usleep(20000);
  return code;
}

int nvmlDeviceGetNvLinkState(struct gpu *g, unsigned link, unsigned *active) {
  unsigned links;
  int code = number(g, "links", &links);
  if (code != OK) return code;
  if (link >= 18) return INVALID_ARGUMENT;
  *active = link < links;
  return OK;
}

struct field {
  unsigned id, scope;
  long long timestamp, latency;
  unsigned type, code;
  union {
    double d;
    unsigned long long ull;
  } value;
};

int nvmlDeviceGetFieldValues(struct gpu *g, int count, struct field *fields) {
  double rate;
  if (lost(g)) return GPU_IS_LOST;
  for (struct field *f = fields; f < fields + count; f++) {
    const char *key = f->id == LINK_SPEED_SENT       ? "nvlink_sent"
                      : f->id == LINK_SPEED_RECEIVED ? "nvlink_received"
                                                     : "?";
    f->type = 3;
    f->code = f->scope == ALL_LINKS && script(g->index, key, &rate) ? OK : NOT_SUPPORTED;
    if (f->code == OK) f->value.ull = (unsigned long long)(rate * (now() - began));
  }
  return OK;
}
