#include "work.h"

#include <stdatomic.h>
#include <stdlib.h>

struct Work {
  WorkPlan plan;
  const FfiApi *api;
  FfiFuture *future; /* NULL when one thread does it all */
  float *scratch;
  atomic_llong next, unfinished;
  atomic_int users, thread;
};

FfiError *fail(const FfiCallFrame *frame, int code, const char *message) {
  FfiErrorCreateArgs args = {sizeof args, NULL, message, code};
  return frame->api->error_create(&args);
}

int is_question(const FfiCallFrame *frame) {
  if (!frame->extensions || frame->extensions->type != FFI_EXTENSION_METADATA) return 0;
  FfiMetadataExtension *question = (FfiMetadataExtension *)frame->extensions;
  question->metadata->version.major = 0;
  question->metadata->version.minor = 3; /* of the header that the declarations were taken from */
  question->metadata->traits = 0;
  return 1;
}

int64_t next_item(Work *work) {
  const int64_t item = atomic_fetch_add(&work->next, 1);
  return item < work->plan.num_items ? item : -1;
}

void finish_item(Work *work) {
  if (atomic_fetch_sub(&work->unfinished, 1) > 1 || !work->future) return;
  FfiFutureArgs args = {sizeof args, NULL, work->future};
  work->api->future_set_available(&args);
}

static void release(Work *work) {
  if (atomic_fetch_sub(&work->users, 1) > 1) return;
  work->plan.free_job(work->plan.job);
  free(work->scratch);
  free(work);
}

static void take_part(void *data) {
  Work *work = data;
  float *scratch = work->scratch + atomic_fetch_add(&work->thread, 1) * work->plan.scratch_len;
  work->plan.run(work, work->plan.job, scratch);
  release(work);
}

/* How many threads of XLA's to ask for beside this one. */
static int num_helpers(const FfiCallFrame *frame, int64_t num_items) {
  int64_t num_threads = 1;
  FfiNumThreadsArgs args = {sizeof args, NULL, frame->context, &num_threads};
  if (frame->api->struct_size < sizeof(FfiApi) || frame->api->thread_pool_num_threads(&args)) return 0;
  if (num_threads > num_items) num_threads = num_items;
  return num_threads > 1 ? (int)num_threads - 1 : 0;
}

FfiError *share(FfiCallFrame *frame, const WorkPlan *plan) {
  Work *work = calloc(1, sizeof *work);
  int helpers = num_helpers(frame, plan->num_items);
  float *scratch = aligned_alloc(64, ((helpers + 1) * plan->scratch_len * sizeof *scratch + 63) / 64 * 64);
  if (!work || !scratch) {
    plan->free_job(plan->job);
    free(scratch);
    free(work);
    return fail(frame, FFI_ERROR_RESOURCE_EXHAUSTED, "a custom call has no memory for its work");
  }
  work->plan = *plan, work->scratch = scratch, work->api = frame->api;
  atomic_store(&work->unfinished, plan->num_items);
  if (helpers) {
    FfiFutureArgs args = {sizeof args, NULL, NULL};
    if (frame->api->future_create(&args)) helpers = 0;
    frame->future = work->future = args.future;
  }
  atomic_store(&work->users, helpers + 1);
  for (int i = 0; i < helpers; i++) {
    FfiScheduleArgs args = {sizeof args, NULL, frame->context, take_part, work};
    if (frame->api->thread_pool_schedule(&args)) release(work);
  }
  take_part(work);
  return NULL;
}
