import { UsageError } from "../../seam/errors.ts";

/** Of what cannot be counted exactly. */
export function tooMuch(cause?: unknown): UsageError {
  return new UsageError(
    `stock: with this quantity, more than ${Number.MAX_SAFE_INTEGER} would be on hand, or less than that below 0`,
    "HF_USAGE",
    cause,
  );
}
