/** An error as people read it; `DEBUG=1` adds where it came from. */
export function describe(error: unknown): string {
  if (process.env["DEBUG"] && error instanceof Error) return error.stack ?? error.message;
  if (!(error instanceof Error)) return String(error);
  // A host with several addresses fails with one error for each, and no message over them.
  if (error instanceof AggregateError && error.message === "") return error.errors.map(describe).join("; ");
  return error.message;
}
