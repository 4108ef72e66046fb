import type { RaceName } from "./race.ts";

export interface DemoOptions {
  readonly only?: readonly RaceName[];
  readonly processes: number;
  readonly callers: number;
  readonly url?: string;
  readonly json?: true;
  readonly html?: string;
}
