// The builder asks which packages JupyterLab itself provides; @jupyterlab/core-meta knows, so no JupyterLab need be installed to build.
// Any JupyterLab 4 provides them at run time: only the lowest version that we rely on is asked for.
import { mkdirSync, readFileSync, writeFileSync } from 'node:fs';

const core = JSON.parse(readFileSync('node_modules/@jupyterlab/core-meta/core.package.json', 'utf8'));
const own = JSON.parse(readFileSync('package.json', 'utf8'));
core.resolutions = { ...core.resolutions, ...own.dependencies };
mkdirSync('.core', { recursive: true });
writeFileSync('.core/package.json', JSON.stringify(core));
