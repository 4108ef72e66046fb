export { conformance, prepare } from "./conformance.ts";
export type { ConformanceBackend, ConformanceCase, ConformanceSite, Ground } from "./conformance.ts";
