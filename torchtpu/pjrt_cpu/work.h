/* The items of one custom call, shared with XLA's own threads. */
#ifndef TPUGATE_WORK_H
#define TPUGATE_WORK_H

#include "xla_ffi.h"

typedef struct Work Work;

typedef struct {
  /* What each thread runs: takes items with next_item until there are none, and says finish_item after each. Its scratch
   * memory is its own. */
  void (*run)(Work *work, void *job, float *scratch);
  void (*free_job)(void *job); /* called once, when no thread looks at the job any more */
  void *job;
  int64_t num_items;   /* at least 1 */
  int64_t scratch_len; /* floats for each thread */
} WorkPlan;

/* The number of an item that nobody else has, or -1. */
int64_t next_item(Work *work);
void finish_item(Work *work);

/* Runs a plan in this thread and in as many of XLA's as there are items for. The call is over with its last item, not
 * with its last thread: a thread that XLA starts late finds nothing to do. Frees the job, whatever happens. */
FfiError *share(FfiCallFrame *frame, const WorkPlan *plan);

FfiError *fail(const FfiCallFrame *frame, int code, const char *message);

/* Whether the call is no call but registration's question, which this answers. */
int is_question(const FfiCallFrame *frame);

#endif
