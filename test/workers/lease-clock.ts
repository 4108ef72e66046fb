/** A machine whose clock is wrong: whoever decides anything by the application's date decides wrongly. */
export function shiftClock(ms: number): void {
  if (ms === 0) return;
  const Right = Date;
  class Wrong extends Right {
    constructor(...args: [] | [number | string | Date]) {
      if (args.length === 0) super(Right.now() + ms);
      else super(args[0]);
    }
    static override now(): number {
      return Right.now() + ms;
    }
  }
  globalThis.Date = Wrong as DateConstructor;
}
