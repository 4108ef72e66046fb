import { HoldfastError } from "../seam/errors.ts";

/** A schedule cannot be kept, or one of its runs is no longer this process's. */
export class ScheduleError extends HoldfastError {
  constructor(
    code: "HF_SCHEDULE_LOST" | "HF_SCHEDULE_CRON" | "HF_CRONER_MISSING" | "HF_CRONER_UNFIT",
    text: string,
    cause?: unknown,
  ) {
    super(code, text, { cause });
  }
}
