export { conformance, prepare } from "./conformance.ts";
export type { Anomaly } from "./explore/anomaly.ts";
export {
  type ExpectOptions,
  type ExploreOptions,
  type Invariant,
  type Progress,
  type Results,
  type Scenario,
  type ThreadScenario,
  expectNoRace,
  explore,
} from "./explore/explore.ts";
export type { FaultKind } from "./explore/faults.ts";
export { type Proxy, type ProxyOptions, proxied } from "./explore/proxy.ts";
export type { PairedStatement, UnexploredPair } from "./explore/pairs.ts";
export { type Coverage, CoverageError, type Exploration, type Level, RaceError } from "./explore/report.ts";
export { type ThreadActor, inThread } from "./explore/threads.ts";
export type { Turn } from "./explore/timeline.ts";
export { execute } from "./ground.ts";
export type { ConformanceCase, ConformanceSite, Ground } from "./ground.ts";
export {
  type CheckOptions,
  type Counterexample,
  type HistoryReport,
  checkHistory,
  expectLinearizable,
} from "./history/check.ts";
export {
  type ModelDecided as Decided,
  type Model,
  type Refutation,
  type Specification,
  sequential,
} from "./history/model.ts";
export * as models from "./history/models.ts";
export type { History, Operation, Outcome } from "./history/operation.ts";
export {
  type RecordOptions,
  type Recorder,
  type RecorderOptions,
  certainlyNothing,
  readHistory,
  recorder,
} from "./history/record.ts";
